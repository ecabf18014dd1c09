# One image for all three services; docker-compose.yml says which one a container runs.
#   TORCH        cuda, or cpu for a much smaller image without GPU support
#   BASE_IMAGE   pin it by digest, NAME@sha256:...: docs/security.md
# For example: docker compose build --build-arg TORCH=cpu
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG TORCH=cuda

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

# Dependencies first: they change less often than the code. What is not listed, with its hash, is not installed.
COPY requirements requirements
RUN pip install --require-hashes --no-deps --only-binary :all: --requirement requirements/image.txt \
    && pip install --require-hashes --no-deps --only-binary :all: --requirement requirements/torch-$TORCH.txt

COPY pyproject.toml README.md LICENSE ./
COPY coppice coppice
COPY orchestrator orchestrator
COPY draft_service draft_service
COPY target_service target_service
COPY shared shared
# The build tool is one of the dependencies: nothing is fetched.
RUN pip install --no-deps --no-index --no-build-isolation . && pip check

# A named volume mounted at one of these folders takes over its owner and mode.
RUN useradd --create-home --uid 10001 coppice \
    && install --directory --owner=coppice /var/lib/coppice/leases \
    && install --directory --owner=coppice --mode=0700 /var/lib/coppice/secret
USER coppice
WORKDIR /home/coppice

CMD ["coppice", "--help"]
