"""llama.cpp serves OpenAI's routes with and without /v1; here they are at /v1 alone."""

import utils

_make_url = utils.ServerProcess.make_url


def make_url(self, path, *args):
    is_openais = path.startswith(("/chat/completions", "/completions", "/embeddings", "/models"))
    return _make_url(self, f"/v1{path}" if is_openais else path, *args)


utils.ServerProcess.make_url = make_url
