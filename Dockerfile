# CPU by default; compose.gpu.yaml sets the two arguments for a GPU. The steps are scripts/install.sh, which Make runs too.
FROM python:3.12-slim

# pip's arguments for torch; empty chooses the CPU build, since no GPU is seen while an image is built.
ARG TORCH=""
# Triton compiles the launcher of each kernel with a C compiler.
ARG SYSTEM_PACKAGES=""
RUN if [ -n "$SYSTEM_PACKAGES" ]; then \
      apt-get update && apt-get install -y --no-install-recommends $SYSTEM_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi

ENV PYTHON=python PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app

# The large layers first: they stay as they are when only cellserve's own code changes.
COPY pyproject.toml ./
COPY scripts/install.sh scripts/
RUN TORCH="$TORCH" scripts/install.sh torch model dependencies

COPY LICENSE README.md ./
COPY server server
COPY engine engine
COPY cache cache
COPY static_graphs static_graphs
RUN scripts/install.sh project

# All that a running server writes lies in /cache, a volume, and /tmp.
RUN useradd --uid 10001 --create-home --home-dir /cache cellserve
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
WORKDIR /cache
USER cellserve

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import http.client, sys; probe = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); probe.request('GET', '/ready'); sys.exit(probe.getresponse().status != 200)"]

ENTRYPOINT ["cellserve"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
