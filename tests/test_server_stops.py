from hypothesis import example, given
from hypothesis import strategies as st

from server.stops import StopFilter, StopStrings


def whole_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The oracle: look at every end in turn, in the whole text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    stop_filter = StopFilter(StopStrings(stops, include_in_output=include))
    deltas = [stop_filter.push(piece) for piece in pieces]
    return [*deltas, stop_filter.finish()], stop_filter.matched


alphabet = st.sampled_from("ab\n")


@given(
    pieces=st.lists(st.text(alphabet, max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet, min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
@example(pieces=["aa", "ab"], stops=["aab"], include=False)  # a third a: what the text ends with falls back, not to 0
def test_streamed_text_equals_the_whole_texts_answer_for_every_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    deltas, matched = run(pieces, stops, include)
    assert ("".join(deltas), matched) == whole_text("".join(pieces), stops, include)


@given(
    pieces=st.lists(st.text(alphabet, max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet, min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_only_the_longest_suffix_that_is_a_proper_prefix_of_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(StopStrings(stops))
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += stop_filter.push(piece)
        if stop_filter.matched is not None:
            return
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(prefix) for prefix in prefixes if seen.endswith(prefix)), default=0)
        assert sent == seen[: len(seen) - held]


def test_b01_a_stop_of_several_tokens_is_cut_cleanly_and_no_part_of_it_is_sent() -> None:
    assert run(["Sum", ":", " 4", "2", "\n", "E", "ND", " more"], ["\nEND"]) == (
        ["Sum", ":", " 4", "2", "", "", "", "", ""],
        "\nEND",
    )


def test_b02_a_stop_ends_inside_a_token() -> None:
    assert run([" Lisbon", " is"], ["Lisb"]) == ([" ", "", ""], "Lisb")


def test_b02_the_match_that_is_complete_first_wins() -> None:
    assert run([" Lisbon"], ["sb", "Lis"]) == ([" ", ""], "Lis")


def test_of_two_matches_complete_together_the_longest_wins() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["x", ""], "abc")


def test_b03_the_held_tail_is_given_out_at_the_end() -> None:
    assert run(["A", " B", " C"], ["C and D"]) == (["A", " B", " ", "C"], None)


def test_b04_only_a_true_prefix_is_held() -> None:
    assert run(["x", "<", "/", "think", ">", "y"], ["<END>"]) == (["x", "", "</", "think", ">", "y", ""], None)
    assert run(list("abcdefghij"), ["zzzzzzzzzzzz"]) == ([*"abcdefghij", ""], None)


def test_the_stop_can_be_part_of_the_output_but_nothing_behind_it() -> None:
    assert run(["a", "EN", "D!"], ["END"], include=True) == (["a", "", "END", ""], "END")
