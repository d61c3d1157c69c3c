# syntax=docker/dockerfile:1.7
# A node on a Jetson Orin Nano: JetPack 6 (L4T r36.4 or later), Ubuntu 22.04, Python 3.10, arm64. Its drafters need no
# GPU (suffix, n-gram), so plain Ubuntu will do; with a model drafter use a CUDA 12.6 base and the kit's torch.
#   docker build -f deploy/images/node-orin.Dockerfile -t baru-node:0.1.0-orin KIT
# Not tried on a board. Pin the digest that you have tested: --build-arg BASE=ubuntu@sha256:...
ARG BASE=ubuntu:22.04

FROM ${BASE} AS build
ARG KIND=orin-chat-mdns-serve
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv
RUN --mount=type=bind,source=wheels,target=/wheels \
    python3 -m venv /opt/baru/current && \
    /opt/baru/current/bin/pip install --no-cache-dir --no-index --no-deps --require-hashes \
        --find-links /wheels --requirement "/wheels/${KIND}.txt"

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Baru drafting, node" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.baru.l4t="36.4"
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 65532 baru && useradd --uid 65532 --gid 65532 --home-dir /var/lib/baru --create-home baru && \
    usermod --append --groups video baru
# The host's release must be of this kind: `baru-micro preflight` compares it.
ENV BARU_IMAGE_L4T=36.4 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/baru/current/bin:$PATH BARU_CONFIG=/etc/baru/baru.toml HF_HUB_OFFLINE=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/baru/current /opt/baru/current
USER 65532:65532
WORKDIR /var/lib/baru
VOLUME /var/lib/baru
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=1m --start-interval=5s --retries=3 \
    CMD ["python3", "-m", "baru_common.probe", "http://127.0.0.1:8000/livez"]
ENTRYPOINT ["baru-micro"]
CMD ["serve"]
