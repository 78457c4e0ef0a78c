# The server for a machine without an accelerator. From the repository's root:
#   docker build --file examples/deploy/cpu.Dockerfile --tag outrider:cpu .
#   docker run --rm --publish 127.0.0.1:8000:8000 outrider:cpu
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/outrider \
    && /opt/outrider/bin/pip install --no-cache-dir --upgrade pip==26.3
# torch has its own layer, so that a change of the sources doesn't download it again.
COPY constraints.txt .
RUN /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY . .
RUN /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve,kv-events]'

FROM python:3.12-slim-bookworm
RUN useradd --uid 10001 --create-home outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/outrider
EXPOSE 8000
# Loading a large model takes minutes; until the server is ready, a failed check doesn't count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# SIGTERM drains the server. Allow more time than --drain-seconds (docker stop --time 45).
STOPSIGNAL SIGTERM
ENTRYPOINT ["outrider", "serve", "--host", "0.0.0.0", "--port", "8000"]
