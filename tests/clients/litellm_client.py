"""litellm, the client of many proxies: completions, chats, streams and a refusal. Arguments: URL MODEL."""

import sys

import litellm

litellm.telemetry = False


def main() -> None:
    url, model = sys.argv[1:3]
    common = {"api_base": f"{url}/v1", "api_key": "x", "temperature": 0, "max_tokens": 8}

    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="The capital of France is", **common)
    assert text.choices[0].text.startswith(" Paris"), text
    assert text.usage.completion_tokens == 8, text.usage
    chunks = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The capital of France is", stream=True, **common
    )
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == text.choices[0].text

    messages = [{"role": "user", "content": "Say hello in French."}]
    for provider in ("hosted_vllm", "openai"):
        said = litellm.completion(model=f"{provider}/{model}", messages=messages, **common)
        assert said.usage.completion_tokens == 8, said
        chunks = list(
            litellm.completion(
                model=f"{provider}/{model}",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                **common,
            )
        )
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert told == said.choices[0].message.content, (told, said)
        assert any(getattr(chunk, "usage", None) for chunk in chunks), "no usage in the stream"

    told = None
    try:
        litellm.completion(model=f"hosted_vllm/{model}", messages=messages, **common | {"max_tokens": 100_000})
    except litellm.BadRequestError as error:
        told = str(error)
    assert told is not None, "a request beyond the context was answered"
    assert "context" in told, told
    print("litellm: completions and chats, whole and streamed, usage and a refusal are right")


if __name__ == "__main__":
    main()
