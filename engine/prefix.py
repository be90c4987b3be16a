"""Prefix reuse: every session begins with the longest prefix that any live or finished session has computed (D13).

Owns the prefix tree and each running session's lease on a path of it; opens and closes sessions in the executor, so
that no cell is held without a claim. The tree keeps what a closed or preempted session had computed and the host had
collected, never a row of a step in flight. Engine thread only; knows tokens and cells, no K/V bytes, no torch.

    session   [ leased path: cells of the tree ][ cells of its own ][ in flight ]
              0                    lease.length          num_settled

A live session's own cells enter the tree only when somebody asks for them: a prompt that goes on where its path ends,
a fork, its end. Where the tree has got the same tokens meanwhile, the session lets its own copies go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cache.radix import Lease, RadixTree, Tokens, common_length
from engine import cell_map
from engine.beginnings import Beginnings
from engine.executor import Executor
from engine.sessions import Session
from engine.types import KvReport, PrefixReset
from engine.view import CellMap

if TYPE_CHECKING:
    from engine.kv_tiers import KvTiers

WORTH_WAITING_TOKENS = 16
"""A session waits for another one's prefill only when it is spared at least as many."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A waiting session's reason: `donor` is computing the tokens that both begin with."""

    donor: Session
    length: int


class PrefixCache:
    """The executor's cells as the loop sees them: what is free, and what the tree would let go."""

    def __init__(
        self,
        executor: Executor[Any],
        *,
        is_on: bool = True,
        make_tiers: Callable[[RadixTree], KvTiers] | None = None,
    ) -> None:
        """Off: sessions share nothing but forks' prompts, and closed ones leave nothing behind.

        make_tiers: what keeps prefixes that the pool has no room for; None: nothing does.
        """
        self._executor = executor
        self._is_on = is_on
        self._tree = RadixTree(executor)
        self._tiers = make_tiers(self._tree) if make_tiers is not None and is_on else None
        self._leases: dict[Session, Lease] = {}  # of every session that is open in the executor
        self._tokens: dict[Session, Tokens] = {}  # a session's tokens as an array; may be behind its list
        self._waits: dict[Session, Wait] = {}
        self._open = Beginnings(1)
        self._computing = Beginnings(WORTH_WAITING_TOKENS)  # of the open ones, who had as much to compute
        self._unkept: deque[Session] = deque()  # opened sessions whose prompt was not given to the tiers yet

    @property
    def available_cells(self) -> int:
        """Free now, or as soon as `make_room` asks for them."""
        return self._executor.free_cells + self._tree.num_evictable

    @property
    def cached_cells(self) -> int:
        """Cells that only the tree holds."""
        return self._tree.num_evictable

    @property
    def shared_cells(self) -> int:
        """Cells that several have a claim on: running sessions, and copies on their way to a tier."""
        return self._tree.num_shared

    def draw(self, max_codes: int) -> tuple[CellMap, tuple[Session, ...]]:
        """The pool for someone who looks, and the sessions that its codes count."""
        return cell_map.draw(self._executor, self._tree, self._leases, max_codes), tuple(self._leases)

    # --- tiers below the pool ---------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether prefixes are on their way between the pool and the tiers."""
        return self._tiers is not None and self._tiers.is_busy

    def poll(self) -> None:
        """Go on with what is on its way. Once a turn."""
        if self._tiers is not None:
            self._keep_prompts(self._tiers)
            self._tiers.poll()

    def wait(self, timeout_s: float) -> None:
        """Until something may have arrived; for a turn that can run nothing."""
        if self._tiers is not None:
            self._tiers.wait(timeout_s)

    def expect(self, session: Session, token_s: float) -> None:
        """The session is queued: begin to fetch what it may begin with. token_s: what computing a token takes."""
        if self._tiers is not None:
            self._tiers.expect(session, session.request.cache_salt, self._reusable(session), token_s)

    # --- before a session runs --------------------------------------------------------------------------------------

    def shared_tokens(self, session: Session) -> int:
        """Tokens of a waiting session that running ones hold anyway: cells that its admission does not take."""
        return self._tree.match(session.request.cache_salt, self._available(session)).num_locked

    def must_wait(self, session: Session) -> bool:
        """Whether a prefix of this waiting session is coming for nothing: from a running one, or from a tier."""
        if self._tiers is not None and self._tiers.must_wait(session):
            return True
        wait = self._waits.get(session)
        if wait is None or not self._is_coming(wait):
            wait = self._find_wait(session)
            if wait is None:
                self._waits.pop(session, None)
                return False
            self._waits[session] = wait
        return True

    # --- a session's life in the executor ---------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """Give a waiting session a place in the executor, with the longest prefix there is already computed.

        Raises SessionsExhausted; nothing is changed then.
        """
        lease = self._tree.acquire(session.request.cache_salt, self._available(session))
        try:
            session.executor_id = self._executor.open_session(
                session.request.sampling,
                seed=session.seed,
                prompt=session.request.prompt_token_ids,
                generated=session.tokens[session.prompt_len :],
                prefix=self._tree.cells(lease),
            )
        except BaseException:
            self._tree.release(lease)
            raise
        self._leases[session] = lease
        tokens = self._tokens_of(session)
        self._open.add(session, lease.node, tokens)
        if tokens.size - lease.length >= WORTH_WAITING_TOKENS:
            self._computing.add(session, lease.node, tokens)
        if self._tiers is not None and session.prompt_len >= self._tiers.chunk_tokens:
            self._unkept.append(session)
        self._forget_waits(session)
        session.begin_at(lease.length)

    def fork(self, stem: Session, fork: Session) -> None:
        """Open `fork` behind the prompt that `stem` has computed. Raises SessionsExhausted; nothing is changed then."""
        assert stem.executor_id is not None
        if self._is_on:
            self._publish(stem)  # from here on both hold the prompt's cells, so the tree must know
        fork.executor_id = self._executor.clone_session(
            stem.executor_id,
            stem.prompt_len,
            fork.request.sampling,
            seed=fork.seed,
            prompt=fork.request.prompt_token_ids,
            generated=fork.tokens[fork.prompt_len :],
        )
        lease = self._leases[fork] = self._tree.share(self._leases[stem])
        tokens = self._tokens[fork] = self._tokens_of(stem)[: stem.prompt_len]
        self._open.add(fork, lease.node, tokens)
        fork.begin_at(fork.prompt_len)

    def close(self, session: Session, *, keep: bool) -> None:
        """Take the session out of the executor. Nothing to do for one that is not in it.

        keep: what it has computed goes into the tree. False after a failed step, which leaves that in doubt.
        """
        lease = self._leases.pop(session, None)
        if lease is None:
            return
        assert session.executor_id is not None
        self._open.discard(session)
        self._computing.discard(session)
        if keep and self._is_on:
            self._publish(session, lease, is_leaving=True)
            if self._tiers is not None:
                self._keep(self._tiers, session, lease)
        self._executor.close_session(session.executor_id)
        self._tree.release(lease)
        session.executor_id = None

    def forget(self, session: Session) -> None:
        """The session has ended and will not come back."""
        self._tokens.pop(session, None)
        self._forget_waits(session)
        if self._tiers is not None:
            self._tiers.ended(session)

    def _forget_waits(self, session: Session) -> None:
        self._waits.pop(session, None)
        if self._tiers is not None:
            self._tiers.forget(session)

    # --- room -------------------------------------------------------------------------------------------------------

    def make_room(self, num_cells: int) -> None:
        """Evict until as many cells are free, least recently used prefixes first. They must be available."""
        missing = num_cells - self._executor.free_cells
        if missing > 0:
            self._tree.evict(missing)

    def reset(self) -> PrefixReset:
        """Evict everything that no running session uses."""
        freed = self._tree.evict(self._tree.num_evictable)
        return PrefixReset(freed, self._tree.num_held)

    def report(self) -> KvReport:
        return KvReport(
            has_prefix_cache=self._is_on,
            cells_total=self._executor.total_cells,
            cells_free=self._executor.free_cells,
            cells_evictable=self._tree.num_evictable,
            tree_cells=self._tree.num_held,
            tree_nodes=self._tree.num_nodes,
            tree_leases=self._tree.num_leases,
            tiers=None if self._tiers is None else self._tiers.report(),
        )

    def _keep_prompts(self, tiers: KvTiers) -> None:
        """Send down prompts of running sessions that are computed, not only when their answers have ended."""
        for _ in range(len(self._unkept)):
            if not tiers.wants_more:
                return
            session = self._unkept.popleft()
            lease = self._leases.get(session)
            if lease is None:
                continue  # it ended, which kept it
            if session.num_settled < session.prompt_len:
                self._unkept.append(session)
                continue
            self._publish(session, lease)
            self._keep(tiers, session, lease)

    def _keep(self, tiers: KvTiers, session: Session, lease: Lease) -> None:
        tiers.keep(session, session.request.cache_salt, self._tokens_of(session)[: lease.length], lease)

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _reusable(self, session: Session) -> Tokens:
        """The tokens whose K/V the session may take from others: all but the last one, which it must run to draw.

        None where every row of the prompt is asked for: its log probabilities, or the mean of its hidden states.
        """
        if not self._is_on or session.wants_prompt_rows or session.request.pooling == "mean":
            return _NO_TOKENS
        return self._tokens_of(session)[:-1]

    def _available(self, session: Session) -> Tokens:
        """Of the reusable tokens, those that the tree can give: where a prefix has holes before its end, fewer."""
        tokens = self._reusable(session)
        self._bring_in(session, tokens)
        if self._tiers is None or not self._tiers.may_have_holes:
            return tokens
        return tokens[: self._tiers.usable(session.request.cache_salt, tokens)]

    def _tokens_of(self, session: Session) -> Tokens:
        """All tokens of the session that the host knows."""
        known = self._tokens.get(session, _NO_TOKENS)
        if known.size < len(session.tokens):
            known = np.concatenate((known, np.array(session.tokens[known.size :], np.int64)))
            self._tokens[session] = known
        return known

    # --- into the tree ----------------------------------------------------------------------------------------------

    def _publish(self, session: Session, lease: Lease | None = None, *, is_leaving: bool = False) -> None:
        """Give the tree what the session has settled, and let go of its own copies of what is there already."""
        lease = self._leases[session] if lease is None else lease
        assert session.executor_id is not None
        tokens = self._tokens_of(session)[: session.num_settled]
        start = lease.length
        if tokens.size <= start:
            return
        known = self._tree.cells_past(lease, tokens)
        is_known = known.size == tokens.size - start
        if self._tiers is not None and self._tiers.has_holes(known):
            # A tier gave them for what lies behind; these were computed here, and are whole in every layer.
            known = self._executor.cells_of(session.executor_id, start, start + known.size)
            self._tree.replace(lease, tokens[: start + known.size], known)
            self._tiers.computed(known)
        elif known.size and not (is_leaving and is_known):
            self._executor.rebase_session(session.executor_id, np.concatenate((self._tree.cells(lease), known)))
        cells = known if is_known else self._executor.cells_of(session.executor_id, start, tokens.size)
        self._tree.extend(lease, tokens, cells)
        if self._tiers is not None:
            self._tiers.computed(cells[known.size :])

    def _bring_in(self, session: Session, tokens: Tokens) -> None:
        """Publish the running session that has computed more of `tokens` than the tree knows of, if there is one."""
        match = self._tree.match(session.request.cache_salt, tokens)
        length = match.length
        if length == tokens.size:
            return
        following = int(tokens[length])
        best: Session | None = None
        for other in self._open.alike(match.node, tokens):
            if other.num_settled <= length or other.tokens[length] != following:
                continue
            settled = self._tokens_of(other)[: other.num_settled]
            reached = common_length(settled, tokens)
            if reached > length:
                best, length = other, reached
                if length == tokens.size:
                    break
                following = int(tokens[length])
        if best is not None:
            self._publish(best)

    # --- waiting for one another ------------------------------------------------------------------------------------

    def _is_coming(self, wait: Wait) -> bool:
        """The donor is still at it. One that ended, failed or was preempted is not waited for."""
        return wait.donor in self._leases and wait.donor.num_settled < wait.length

    def _find_wait(self, session: Session) -> Wait | None:
        tokens = self._reusable(session)
        salt = session.request.cache_salt
        best: Wait | None = None
        for donor in self._computing.alike(self._tree.match(salt, tokens).node, tokens):
            if len(donor.tokens) - donor.num_settled < WORTH_WAITING_TOKENS:
                continue
            length = common_length(self._tokens_of(donor), tokens)
            if length > max(donor.num_settled, best.length if best else 0):
                best = Wait(donor, length)
        if best is None:
            return None
        self._bring_in(session, tokens)
        return best if best.length - self._tree.match(salt, tokens).length >= WORTH_WAITING_TOKENS else None


_NO_TOKENS: Tokens = np.empty(0, np.int64)
