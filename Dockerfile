# docker build -t guided-spec .                          for a CPU
# docker build -t guided-spec --build-arg DEVICE=cuda .  for an NVIDIA GPU; run it with --gpus all
FROM python:3.12-slim

# Triton compiles a launcher for each kernel on its first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG DEVICE=cpu
ARG TORCH=2.13.0
RUN case "$DEVICE" in \
        cpu) pip install --no-cache-dir "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) pip install --no-cache-dir "torch==$TORCH" ;; \
        *) echo "DEVICE=$DEVICE: must be cpu or cuda" >&2; exit 1 ;; \
    esac

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY guided_spec guided_spec
RUN pip install --no-cache-dir ".[serve]" && rm -rf /src/*

RUN useradd --create-home guided && mkdir /models && chown guided /models
USER guided
WORKDIR /home/guided
ENV HF_HOME=/models \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["guided-spec"]
# Reachable from outside the container: pass -e GUIDED_SPEC_API_KEY=...
CMD ["serve", "--host", "0.0.0.0"]
