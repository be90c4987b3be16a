"""langchain-openai: single prompts, a batch, streams, a chat and a structured answer. Arguments: URL MODEL."""

import sys

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    url, model = sys.argv[1:3]
    common = {"base_url": f"{url}/v1", "model": model, "api_key": "x", "temperature": 0}
    llm = OpenAI(max_tokens=8, **common)

    alone = llm.invoke("The capital of France is")
    assert alone.startswith(" Paris"), alone
    assert "".join(llm.stream("The capital of France is")) == alone
    answers = llm.batch(["The capital of France is", "Once upon a time", *"abcdef"])
    assert answers[0] == alone, answers
    # Two prompts in one request, and what it cost.
    together = llm.generate(["The capital of France is", "Once upon a time"])
    assert [choices[0].text for choices in together.generations] == answers[:2]
    usage = together.llm_output["token_usage"]
    assert usage["completion_tokens"] == 16, usage

    chat = ChatOpenAI(max_tokens=8, **common)
    said = chat.invoke("Say hello in French.")
    assert said.content, said
    assert said.usage_metadata["output_tokens"] == 8, said.usage_metadata
    assert "".join(chunk.content for chunk in chat.stream("Say hello in French.")) == said.content
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)

    person = ChatOpenAI(max_tokens=80, **common).with_structured_output(Person, method="json_schema")
    assert isinstance(person.invoke("Ann is 30 years old."), Person)
    print("langchain-openai: completions, batch, streams, chat, logprobs and structured output are right")


if __name__ == "__main__":
    main()
