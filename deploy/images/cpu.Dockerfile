# syntax=docker/dockerfile:1.7
# Hub and node on the CPU, amd64 or arm64. The context is a kit's folder, so nothing but the base comes over a network:
#   docker build -f deploy/images/cpu.Dockerfile --target hub --build-arg KIND=x86-hub-mdns-serve -t baru-hub:0.1.0-cpu KIT
# KIND names one of KIT/wheels/*.txt: the packages, with their digests, of that kind of machine.
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG KIND
RUN --mount=type=bind,source=wheels,target=/wheels \
    python -m venv /opt/baru/current && \
    /opt/baru/current/bin/pip install --no-cache-dir --no-index --no-deps --require-hashes \
        --find-links /wheels --requirement "/wheels/${KIND}.txt" && \
    /opt/baru/current/bin/pip uninstall --yes pip

FROM python:${PYTHON} AS base
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Baru drafting" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN groupadd --gid 65532 baru && useradd --uid 65532 --gid 65532 --home-dir /var/lib/baru --create-home baru
ENV PATH=/opt/baru/current/bin:$PATH BARU_CONFIG=/etc/baru/baru.toml HF_HUB_OFFLINE=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/baru/current /opt/baru/current
USER 65532:65532
WORKDIR /var/lib/baru
VOLUME /var/lib/baru

FROM base AS hub
EXPOSE 7443 7444
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=5s --retries=3 \
    CMD ["python", "-m", "baru_common.probe", "http://127.0.0.1:7444/readyz"]
ENTRYPOINT ["baru-hub"]
CMD ["serve"]

FROM base AS node
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=1m --start-interval=5s --retries=3 \
    CMD ["python", "-m", "baru_common.probe", "http://127.0.0.1:8000/livez"]
ENTRYPOINT ["baru-micro"]
CMD ["serve"]
