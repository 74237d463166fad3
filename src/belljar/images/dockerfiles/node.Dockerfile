# python.Dockerfile, and Node.js.
ARG BASE=python:3.12.11-slim-bookworm
ARG NODE=node:22.17.0-bookworm-slim
FROM ${NODE} AS node
FROM ${BASE}
USER 0
COPY --from=node /usr/local/bin/node /usr/local/bin/node
# A read-only root could not keep what the interpreter compiles. What does not compile (templates, old
# dialects) never did.
RUN python3 -m compileall -q -f --invalidation-mode unchecked-hash "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" || true
COPY image.json /usr/share/belljar/image.json
ENV LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace
USER 1000:1000
CMD ["bash"]
