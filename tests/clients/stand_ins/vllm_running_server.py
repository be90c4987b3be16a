"""In place of vLLM's module that starts servers: the server under test runs already, whatever it is started with."""

import os

import openai

URL = os.environ["SUT_URL"]


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, *args, **options):
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)
        self.url_root = URL

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def url_for(self, *parts):
        return "/".join((URL, *parts))

    def get_client(self, **options):
        return openai.OpenAI(**self._client | options)

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(**self._client | options)

    @property
    def _client(self):
        return {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60}


RemoteVLLMServer = RemoteOpenAIServer
