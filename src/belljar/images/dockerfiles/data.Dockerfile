# python.Dockerfile, and the packages of data work.
ARG BASE=python:3.12.11-slim-bookworm
FROM ${BASE}
USER 0
RUN pip install --no-cache-dir --no-compile numpy==2.3.1 pandas==2.3.1 pyarrow==21.0.0 matplotlib==3.10.3
# A read-only root could not keep what the interpreter compiles. What does not compile (templates, old
# dialects) never did.
RUN python3 -m compileall -q -f --invalidation-mode unchecked-hash "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" || true
COPY image.json /usr/share/belljar/image.json
ENV LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
WORKDIR /workspace
USER 1000:1000
CMD ["bash"]
