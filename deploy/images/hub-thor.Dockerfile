# syntax=docker/dockerfile:1.7
# The hub on a Jetson AGX Thor: JetPack 7 (L4T r38), Ubuntu 24.04, Python 3.12, CUDA 13.0, arm64.
#   docker build -f deploy/images/hub-thor.Dockerfile -t baru-hub:0.1.0-thor KIT
# Not tried on a board. Check the tag, and pin the digest that you have tested: --build-arg BASE=...@sha256:...
# For a server with discrete GPUs: --build-arg L4T= and --tag baru-hub:0.1.0-cuda.
# The kit's torch has to be a build with kernels for sm_110 (docs/boards.md).
ARG BASE=nvcr.io/nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${BASE} AS build
ARG KIND=thor-hub-mdns-serve
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv
RUN --mount=type=bind,source=wheels,target=/wheels \
    python3 -m venv /opt/baru/current && \
    /opt/baru/current/bin/pip install --no-cache-dir --no-index --no-deps --require-hashes \
        --find-links /wheels --requirement "/wheels/${KIND}.txt"

FROM ${BASE}
ARG VERSION=0.1.0
ARG L4T=38
LABEL org.opencontainers.image.title="Baru drafting, hub" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.baru.l4t="38"
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 65532 baru && useradd --uid 65532 --gid 65532 --home-dir /var/lib/baru --create-home baru && \
    usermod --append --groups video baru
# The host's release must be of this kind: `baru-hub preflight` compares it.
ENV BARU_IMAGE_L4T=${L4T} NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/baru/current/bin:$PATH BARU_CONFIG=/etc/baru/baru.toml HF_HUB_OFFLINE=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/baru/current /opt/baru/current
USER 65532:65532
WORKDIR /var/lib/baru
VOLUME /var/lib/baru
EXPOSE 7443 7444
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=5s --retries=3 \
    CMD ["python", "-m", "baru_common.probe", "http://127.0.0.1:7444/readyz"]
ENTRYPOINT ["baru-hub"]
CMD ["serve"]
