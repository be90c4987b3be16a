"""The requests that both servers are asked, one Case each: what the API means, field by field and refusal by refusal.

Greedy where values are to be compared. A case that draws (`is_drawn`) is compared by its shape alone. The model is the
small one of `make serve`: its ids below are those of its tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 1024

FRANCE = "The capital of France is"
FRANCE_IDS = [504, 3575, 282, 4649, 314]
ONCE = "Once upon a time"
ONCE_IDS = [6403, 1980, 253, 655]
THE, DOT, NEWLINE, PARIS = 260, 30, 198, 7042
END_OF_TURN = 2
TOO_LONG = "word " * 1100

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Any = None
    """JSON, or bytes sent as they are; None: nothing is sent."""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    is_drawn: bool = False
    """Texts and numbers of the answer are random: only its shape is compared."""

    @property
    def request(self) -> Any:
        """What is sent, as a recording remembers it."""
        body = self.body.decode("latin-1") if isinstance(self.body, bytes) else self.body
        return [self.method, self.path, body, self.headers]


def completion(name: str, *, is_drawn: bool = False, without: tuple[str, ...] = (), **fields: Any) -> Case:
    """Greedy, four tokens, of FRANCE; `fields` replace that and `without` takes away."""
    body = {"model": MODEL, "prompt": FRANCE, "temperature": 0, "max_tokens": 4, **fields}
    body = {key: value for key, value in body.items() if key not in without}
    return Case(f"completions/{name}", COMPLETIONS, body, is_drawn=is_drawn)


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(name: str, *, is_drawn: bool = False, without: tuple[str, ...] = (), **fields: Any) -> Case:
    body = {"model": MODEL, "messages": said("Say hello in French."), "temperature": 0, "max_tokens": 4, **fields}
    body = {key: value for key, value in body.items() if key not in without}
    return Case(f"chat/{name}", CHAT, body, is_drawn=is_drawn)


def post(name: str, path: str, body: Any, **headers: str) -> Case:
    return Case(name, path, body, headers={key.replace("_", "-"): value for key, value in headers.items()})


def get(name: str, path: str, method: str = "GET") -> Case:
    return Case(name, path, method=method)


USAGE = {"include_usage": True}
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}

LENGTHS = [
    completion("max_tokens_left_out", without=("max_tokens",)),
    completion("max_tokens_null", max_tokens=None),
    completion("max_tokens_1", max_tokens=1),
    completion("max_tokens_0", max_tokens=0),
    completion("max_tokens_0_echo", max_tokens=0, echo=True),
    completion("max_tokens_0_echo_logprobs", max_tokens=0, echo=True, logprobs=1),
    completion("max_tokens_negative", max_tokens=-1),
    completion("max_tokens_text", max_tokens="4"),
    completion("max_tokens_float", max_tokens=4.5),
    completion("max_tokens_beyond_context", max_tokens=5000),
    completion("prompt_beyond_context", prompt=TOO_LONG),
    completion("prompt_ids_beyond_context", prompt=[THE] * (MAX_MODEL_LEN + 1)),
    completion("prompt_fills_context", prompt=[THE] * MAX_MODEL_LEN, max_tokens=1),
    completion("min_tokens", min_tokens=4, stop_token_ids=[PARIS]),
    completion("min_tokens_over_max_tokens", min_tokens=9),
    completion("min_tokens_negative", min_tokens=-1),
    completion("ignore_eos", ignore_eos=True, max_tokens=8),
    completion("max_tokens_beyond_64_bits", max_tokens=2**70),
    completion("max_completion_tokens", max_completion_tokens=2, without=("max_tokens",)),
]

PROMPTS = [
    completion("prompt_text"),
    completion("prompt_texts", prompt=[FRANCE, ONCE]),
    completion("prompt_ids", prompt=FRANCE_IDS),
    completion("prompt_lists_of_ids", prompt=[FRANCE_IDS, ONCE_IDS]),
    completion("prompt_one_text_in_a_list", prompt=[ONCE]),
    completion("prompt_missing", without=("prompt",)),
    completion("prompt_null", prompt=None),
    completion("prompt_empty_text", prompt=""),
    completion("prompt_empty_list", prompt=[]),
    completion("prompt_empty_ids", prompt=[[]]),
    completion("prompt_list_of_empty_text", prompt=[""]),
    completion("prompt_mixed", prompt=[FRANCE, FRANCE_IDS]),
    completion("prompt_mixed_in_one", prompt=["The", 504]),
    completion("prompt_one_of_two_empty", prompt=[FRANCE, ""]),
    completion("prompt_number", prompt=7),
    completion("prompt_object", prompt={"text": FRANCE}),
    completion("prompt_id_outside_vocabulary", prompt=[504, 60000]),
    completion("prompt_id_negative", prompt=[504, -1]),
    completion("prompt_id_float", prompt=[504, 7.5]),
    completion("prompt_id_true", prompt=[504, True]),
    completion("prompt_special_text", prompt="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    completion("prompt_emoji", prompt="Smile: \U0001f600 and \u00e9t\u00e9", echo=True, logprobs=1, max_tokens=2),
    completion("add_special_tokens_false", add_special_tokens=False),
    completion("truncate_left", truncate_prompt_tokens=3, echo=True, prompt=FRANCE_IDS),
    completion("truncate_text", truncate_prompt_tokens=3, return_token_ids=True),
    completion("truncate_right", truncate_prompt_tokens=3, truncation_side="right", return_token_ids=True),
    completion("truncate_to_context", prompt=TOO_LONG, truncate_prompt_tokens=-1, max_tokens=1),
    completion("truncate_0", truncate_prompt_tokens=0),
    completion("truncate_negative", truncate_prompt_tokens=-2),
    completion("truncation_side_unknown", truncate_prompt_tokens=3, truncation_side="middle"),
]

CHOICES = [
    completion("n_2_greedy", n=2),
    completion("n_2_drawn", n=2, temperature=1, seed=5, ignore_eos=True, is_drawn=True),
    completion("n_2_of_two_prompts", prompt=[FRANCE, ONCE], n=2, temperature=1, seed=5, ignore_eos=True, is_drawn=True),
    completion("n_0", n=0),
    completion("n_negative", n=-1),
    completion("n_text", n="2"),
    completion("n_huge", n=20000, temperature=1),
    completion("best_of_1", best_of=1),
    completion("best_of_null", best_of=None),
    completion("best_of_3", best_of=3, temperature=1, seed=1, ignore_eos=True, is_drawn=True),
    completion("best_of_below_n", best_of=2, n=3, temperature=1, ignore_eos=True, is_drawn=True),
    completion("suffix", suffix=" is the end"),
    completion("use_beam_search", use_beam_search=True, n=2),
]

LOGPROBS = [
    completion("echo", echo=True),
    completion("echo_ids", echo=True, prompt=FRANCE_IDS),
    completion("echo_logprobs", echo=True, logprobs=2, max_tokens=1),
    completion("echo_logprobs_of_two_prompts", echo=True, logprobs=1, max_tokens=1, prompt=[FRANCE_IDS, ONCE_IDS]),
    completion("logprobs_0", logprobs=0),
    completion("logprobs_1", logprobs=1),
    completion("logprobs_5", logprobs=5),
    completion("logprobs_20", logprobs=20, max_tokens=1),
    completion("logprobs_21", logprobs=21),
    completion("logprobs_negative", logprobs=-1),
    completion("logprobs_true", logprobs=True),
    completion("logprobs_of_a_token_outside_the_top", logprobs=1, allowed_token_ids=[905], max_tokens=2),
    completion("logprobs_before_temperature", logprobs=2, temperature=0, logit_bias={str(PARIS): -50}, max_tokens=1),
    completion("logprobs_n_2", logprobs=2, n=2, temperature=1, seed=5, ignore_eos=True, is_drawn=True),
    completion("logprobs_with_a_stop_text", logprobs=1, stop=["."], max_tokens=8),
    completion("prompt_logprobs_0", prompt_logprobs=0, max_tokens=1),
    completion("prompt_logprobs_2", prompt_logprobs=2, max_tokens=1),
    completion("prompt_logprobs_21", prompt_logprobs=21),
    completion("prompt_logprobs_negative", prompt_logprobs=-2),
    completion("prompt_logprobs_streamed", prompt_logprobs=1, stream=True),
    completion("return_token_ids", return_token_ids=True),
    completion("return_tokens_as_token_ids", return_tokens_as_token_ids=True, logprobs=1),
]

SAMPLING = [
    completion("drawn", temperature=1, ignore_eos=True, is_drawn=True),
    completion("temperature_left_out", without=("temperature",), seed=3, ignore_eos=True, is_drawn=True),
    completion("temperature_tiny", temperature=1e-6),
    completion("temperature_negative", temperature=-0.1),
    completion("temperature_2", temperature=2, top_k=1),
    completion("temperature_2_1", temperature=2.1),
    completion("temperature_text", temperature="hot"),
    completion("top_k_1", temperature=1, top_k=1),
    completion("top_k_minus_1", top_k=-1),
    completion("top_k_0", top_k=0),
    completion("top_k_beyond_vocabulary", top_k=100000),
    completion("top_k_minus_2", top_k=-2),
    completion("top_p_0", top_p=0, temperature=1),
    completion("top_p_small", top_p=1e-9, temperature=1),
    completion("top_p_1_1", top_p=1.1),
    completion("top_p_negative", top_p=-0.1),
    completion("min_p_1", min_p=1, temperature=1),
    completion("min_p_1_5", min_p=1.5),
    completion("seed", seed=7, temperature=1, ignore_eos=True, is_drawn=True),
    completion("seed_negative", seed=-7, temperature=1, ignore_eos=True, is_drawn=True),
    completion("seed_beyond_64_bits", seed=2**64),
    completion("seed_text", seed="7"),
    completion("presence_penalty", presence_penalty=2, prompt=ONCE, max_tokens=12),
    completion("frequency_penalty", frequency_penalty=2, prompt=ONCE, max_tokens=12),
    completion("repetition_penalty", repetition_penalty=1.5, prompt=ONCE, max_tokens=12),
    completion("presence_penalty_2_1", presence_penalty=2.1),
    completion("frequency_penalty_minus_3", frequency_penalty=-3),
    completion("repetition_penalty_0", repetition_penalty=0),
    completion("repetition_penalty_negative", repetition_penalty=-1),
    completion("logit_bias_plus", logit_bias={str(DOT): 100}),
    completion("logit_bias_minus", logit_bias={str(PARIS): -100}),
    completion("logit_bias_200", logit_bias={str(DOT): 200}),
    completion("logit_bias_of_no_id", logit_bias={"Paris": 1}),
    completion("logit_bias_outside_vocabulary", logit_bias={"60000": 1}),
    completion("logit_bias_list", logit_bias=[1]),
    completion("allowed_token_ids", allowed_token_ids=[DOT, NEWLINE, THE]),
    completion("allowed_token_ids_empty", allowed_token_ids=[]),
    completion("allowed_token_ids_outside_vocabulary", allowed_token_ids=[60000]),
    completion("bad_words", bad_words=["Paris"]),
    completion("bad_words_of_two_tokens", bad_words=["Paris."], max_tokens=6),
    completion("bad_words_empty_word", bad_words=[""]),
    completion("bad_words_number", bad_words=[7]),
]

STOPS = [
    completion("stop_text", stop=".", max_tokens=8),
    completion("stop_list", stop=["nothing", " Paris"], max_tokens=8),
    completion("stop_over_two_tokens", stop=["Paris."], max_tokens=8),
    completion("stop_included", stop=["."], include_stop_str_in_output=True, max_tokens=8),
    completion("stop_never_comes", stop=["\u00df"]),
    completion("stop_empty_list", stop=[]),
    completion("stop_null", stop=None),
    completion("stop_empty_text", stop=""),
    completion("stop_5_texts", stop=["a", "b", "c", "d", "e"]),
    completion("stop_number", stop=7),
    completion("stop_text_over_the_prompts_border", stop=["is Paris", "France"]),
    completion("stop_text_echoed", stop=["."], echo=True, max_tokens=8),
    completion("stop_behind_min_tokens", stop=["."], min_tokens=6, max_tokens=12),
    completion("stop_token_ids", stop_token_ids=[DOT], max_tokens=8),
    completion("stop_token_ids_included", stop_token_ids=[DOT], include_stop_str_in_output=True, max_tokens=8),
    completion("stop_token_ids_text", stop_token_ids=["30"]),
    completion("stop_token_ids_outside_vocabulary", stop_token_ids=[60000]),
    completion("stop_token_and_length_at_once", stop_token_ids=[PARIS], max_tokens=1),
    completion("end_of_text", logit_bias={str(END_OF_TURN): 100}),
    completion("end_of_text_shown", logit_bias={str(END_OF_TURN): 100}, skip_special_tokens=False, logprobs=1),
    completion("end_of_text_ignored", logit_bias={str(END_OF_TURN): 100}, ignore_eos=True, return_token_ids=True),
]

STREAMS = [
    completion("stream", stream=True),
    completion("stream_usage", stream=True, stream_options=USAGE),
    completion("stream_usage_always", stream=True, stream_options=ALWAYS),
    completion("stream_usage_false", stream=True, stream_options={"include_usage": False}),
    completion("stream_options_null", stream=True, stream_options=None),
    completion("stream_options_without_stream", stream_options=USAGE),
    completion("stream_options_of_wrong_type", stream=True, stream_options={"include_usage": "yes"}),
    completion("stream_text", stream="yes"),
    completion("stream_echo", stream=True, echo=True),
    completion("stream_echo_logprobs", stream=True, echo=True, logprobs=1, max_tokens=2),
    completion("stream_logprobs", stream=True, logprobs=2),
    completion("stream_token_ids", stream=True, return_token_ids=True),
    completion("stream_two_prompts", stream=True, prompt=[FRANCE, ONCE], stream_options=USAGE),
    completion("stream_n_2", stream=True, n=2, temperature=1, seed=5, ignore_eos=True, is_drawn=True),
    completion("stream_stop", stream=True, stop=["Paris."], max_tokens=8),
    completion("stream_max_tokens_0_echo", stream=True, max_tokens=0, echo=True),
    completion("stream_refused", stream=True, prompt=TOO_LONG),
    completion("stream_bad_value", stream=True, temperature=-1),
    completion("stream_emoji", stream=True, allowed_token_ids=[2756], max_tokens=2),
]

FORMS = [
    completion("structured_choice", structured_outputs={"choice": ["Rome", "Paris"]}, max_tokens=8),
    completion("structured_regex", structured_outputs={"regex": "[0-9]{3}"}, max_tokens=8),
    completion("structured_json", structured_outputs={"json": PERSON}, max_tokens=40, prompt="A person as JSON:"),
    completion("structured_two_kinds", structured_outputs={"regex": "a", "choice": ["b"]}),
    completion("structured_bad_regex", structured_outputs={"regex": "("}),
    completion("structured_bad_schema", structured_outputs={"json": {"type": "nothing"}}),
    completion("structured_unknown_kind", structured_outputs={"regexp": "a"}),
    completion("structured_with_logprobs", structured_outputs={"choice": ["Rome", "Paris"]}, logprobs=1),
    completion("structured_no_kind", structured_outputs={}),
    completion("response_format_text", response_format={"type": "text"}),
    completion("response_format_unknown", response_format={"type": "yaml"}),
    completion("guided_regex", guided_regex="[0-9]+"),
]

CHATS = [
    chat("plain"),
    chat("max_completion_tokens", max_completion_tokens=3, without=("max_tokens",)),
    chat("both_limits", max_completion_tokens=3, max_tokens=3),
    chat("to_the_end", messages=said("Answer with one word: yes or no?"), max_tokens=40),
    chat("system", messages=[{"role": "system", "content": "Be brief."}, *said("Hi")]),
    chat("turns", messages=[*said("Hi"), {"role": "assistant", "content": "Hello."}, *said("Bye")]),
    chat("content_parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
    chat("role_unknown", messages=[{"role": "king", "content": "Hi"}]),
    chat("content_missing", messages=[{"role": "user"}]),
    chat("content_number", messages=[{"role": "user", "content": 7}]),
    chat("messages_empty", messages=[]),
    chat("messages_missing", without=("messages",)),
    chat("messages_text", messages="Hi"),
    chat("image_part", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    chat("too_long", messages=said(TOO_LONG)),
    chat("logprobs", logprobs=True, top_logprobs=2),
    chat("logprobs_alone", logprobs=True),
    chat("top_logprobs_alone", top_logprobs=2),
    chat("top_logprobs_21", logprobs=True, top_logprobs=21),
    chat("n_2", n=2, temperature=1, seed=5, ignore_eos=True, is_drawn=True),
    chat("stop", stop=["!"], max_tokens=12),
    chat("return_token_ids", return_token_ids=True),
    chat("prompt_logprobs", prompt_logprobs=1, max_tokens=1),
    chat("stream", stream=True),
    chat("stream_usage", stream=True, stream_options=USAGE),
    chat("stream_usage_always", stream=True, stream_options=ALWAYS),
    chat("stream_logprobs", stream=True, logprobs=True, top_logprobs=1),
    chat("stream_n_2", stream=True, n=2, temperature=1, seed=5, ignore_eos=True, is_drawn=True),
    chat("stream_token_ids", stream=True, return_token_ids=True),
    chat("stream_refused", stream=True, messages=said(TOO_LONG)),
    chat("add_generation_prompt_false", add_generation_prompt=False, return_token_ids=True),
    chat("json_object", response_format={"type": "json_object"}, max_tokens=24),
    chat("json_schema", response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}),
    chat("json_schema_missing", response_format={"type": "json_schema"}),
    chat("choice", structured_outputs={"choice": ["Bonjour", "Salut"]}, max_tokens=8),
    chat("stream_choice", structured_outputs={"choice": ["Bonjour", "Salut"]}, max_tokens=8, stream=True),
    chat("stream_stop", stop=["!"], max_tokens=12, stream=True),
    chat("logit_bias", logit_bias={str(DOT): 100}),
    chat("n_0", n=0),
    chat("temperature_3", temperature=3),
    chat("named_speaker", messages=[{"role": "user", "name": "Ann", "content": "Hi"}]),
    chat("tools_auto", tools=[WEATHER], tool_choice="auto"),
    chat("tools_none", tools=[WEATHER], tool_choice="none"),
    chat("tools_required", tools=[WEATHER], tool_choice="required", max_tokens=40),
    chat("tools_named", tools=[WEATHER], tool_choice=NAMED, max_tokens=40),
    chat("tools_named_stream", tools=[WEATHER], tool_choice=NAMED, max_tokens=40, stream=True),
    chat("tools_of_an_unknown_name", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "x"}}),
    chat("tool_choice_without_tools", tool_choice="required"),
    chat("tools_empty", tools=[]),
]

TOKENS = [
    post("tokens/prompt", "/tokenize", {"model": MODEL, "prompt": FRANCE}),
    post("tokens/prompt_without_model", "/tokenize", {"prompt": FRANCE}),
    post("tokens/empty_prompt", "/tokenize", {"prompt": ""}),
    post("tokens/strings", "/tokenize", {"prompt": "h\u00e9 \U0001f600", "return_token_strs": True}),
    post("tokens/messages", "/tokenize", {"messages": said("Hi")}),
    post("tokens/messages_open", "/tokenize", {"messages": said("Hi"), "add_generation_prompt": False}),
    post("tokens/nothing", "/tokenize", {}),
    post("tokens/prompt_number", "/tokenize", {"prompt": 7}),
    post("tokens/unknown_model", "/tokenize", {"model": "other", "prompt": "a"}),
    post("tokens/back", "/detokenize", {"model": MODEL, "tokens": FRANCE_IDS}),
    post("tokens/back_special", "/detokenize", {"tokens": [1, 4093, 198]}),
    post("tokens/back_nothing", "/detokenize", {"tokens": []}),
    post("tokens/back_missing", "/detokenize", {}),
    post("tokens/back_text", "/detokenize", {"tokens": "504"}),
    post("tokens/back_outside_vocabulary", "/detokenize", {"tokens": [60000]}),
    post("tokens/back_negative", "/detokenize", {"tokens": [-1]}),
    get("tokens/info", "/tokenizer_info"),
]

ROUTES = [
    get("routes/models", "/v1/models"),
    get("routes/model", f"/v1/models/{MODEL}"),
    get("routes/unknown_model", "/v1/models/other"),
    get("routes/health", "/health"),
    get("routes/ping", "/ping"),
    get("routes/version", "/version"),
    Case("routes/load", "/load", method="GET", is_drawn=True),
    get("routes/unknown", "/v1/nothing"),
    get("routes/wrong_method", COMPLETIONS),
    get("routes/wrong_method_delete", COMPLETIONS, "DELETE"),
]

BODIES = [
    completion("unknown_model", model="other"),
    completion("model_left_out", without=("model",)),
    completion("model_number", model=7),
    completion("unknown_field", surprise=1),
    completion("user", user="somebody"),
    completion("priority_0", priority=0),
    completion("cache_salt", cache_salt="salt"),
    completion("cache_salt_empty", cache_salt=""),
    chat("unknown_model", model="other"),
    post("bodies/no_json", COMPLETIONS, b'{"model": ', content_type="application/json"),
    post("bodies/empty", COMPLETIONS, b"", content_type="application/json"),
    post("bodies/list", COMPLETIONS, b"[1]", content_type="application/json"),
    post("bodies/text", COMPLETIONS, b'"prompt"', content_type="application/json"),
    post("bodies/not_utf_8", COMPLETIONS, b'{"prompt": "\xff"}', content_type="application/json"),
    post("bodies/form", COMPLETIONS, b"prompt=a", content_type="application/x-www-form-urlencoded"),
    post("bodies/untyped", COMPLETIONS, b'{"prompt": "The", "max_tokens": 1, "temperature": 0}'),
]

CASES = [
    *LENGTHS,
    *PROMPTS,
    *CHOICES,
    *LOGPROBS,
    *SAMPLING,
    *STOPS,
    *STREAMS,
    *FORMS,
    *CHATS,
    *TOKENS,
    *ROUTES,
    *BODIES,
]
