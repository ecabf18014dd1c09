# One image for all three services; docker-compose.yml says which one a container runs.
# On Linux pip takes the CUDA build of torch. For a much smaller image without GPU support:
#   docker compose build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=""

# Triton compiles its launchers with the C compiler at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    GRPC_VERBOSITY=ERROR \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/coppice

# Dependencies first: they change less often than the code.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['tracing'], sep='\n')" > requirements.txt \
    && PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install --constraint constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY coppice coppice
COPY orchestrator orchestrator
COPY draft_service draft_service
COPY target_service target_service
COPY shared shared
RUN pip install --no-deps --constraint constraints.txt .

# A named volume mounted at one of these folders takes over its owner and mode.
RUN useradd --create-home --uid 10001 coppice \
    && install --directory --owner=coppice /var/lib/coppice/leases \
    && install --directory --owner=coppice --mode=0700 /var/lib/coppice/secret
USER coppice
WORKDIR /home/coppice

CMD ["coppice", "--help"]
