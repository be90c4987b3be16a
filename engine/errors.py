"""Every error the engine hands to its callers, in one tree.

CellserveError
├── ConfigError            an option or a combination of options cannot work
├── ModelError             the model cannot be loaded or run, and why
├── RequestRefused         nothing was admitted; the message names value and limit
│   ├── RequestTooLong     prompt + new tokens pass the context
│   ├── RequestTooLarge    could never fit the pool, or n passes max_num_seqs
│   ├── GrammarRefused     the grammar cannot be compiled, or matches nothing
│   ├── QueueFull          try again later
│   ├── Draining           this server is going away
│   └── EngineUnavailable  the engine is not up
├── SessionsExhausted      the executor has no free session; nothing was opened
├── SessionRefused         an executor's session cannot do what was asked of it; nothing was changed
├── StepFailed             a step died on the host; its sessions are poisoned, the engine goes on
└── DeviceLost             nothing on the device can be used again: the engine ends
"""

from __future__ import annotations


class CellserveError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(CellserveError):
    """An option or a combination of options cannot work."""


class ModelError(CellserveError):
    """The model cannot be loaded or run; the message names it and the reason."""


class RequestRefused(CellserveError):
    """The request was not admitted and left no trace."""


class RequestTooLong(RequestRefused):
    """Prompt and new tokens together pass the context length."""

    def __init__(self, prompt_tokens: int, max_new_tokens: int, max_model_len: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.max_model_len = max_model_len
        super().__init__(
            f"this model's context is {max_model_len} tokens, but the request has {prompt_tokens} prompt tokens "
            f"and asks for {max_new_tokens} more"
        )


class RequestTooLarge(RequestRefused):
    """The request could never run on this server, however long it waited."""


class GrammarRefused(RequestRefused):
    """The grammar cannot be compiled within its limits, or matches nothing; the message says what is wrong with it."""


class QueueFull(RequestRefused):
    """As many requests as allowed are already here."""


class Draining(RequestRefused):
    """The server is shutting down and takes nothing new."""


class EngineUnavailable(RequestRefused):
    """The engine is not running."""


class SessionsExhausted(CellserveError):
    """The executor has no free session; nothing was opened."""


class SessionRefused(CellserveError):
    """An executor's session cannot do what was asked of it; nothing was changed."""


class StepFailed(CellserveError):
    """A step failed on the host after it was launched; its sessions cannot go on."""


class DeviceLost(CellserveError):
    """Nothing on the device can be used again in this process: the engine ends."""
