"""The Dockerfile of the three images: cpu, cuda and mlflow."""

from __future__ import annotations

from jobs.submission.render.pods import USER_ID
from jobs.submission.values import ClusterValues

_DOCKERFILE = """\
# Build, in the root of the repository, one of the targets cpu, cuda and mlflow:
#
#   docker build --file infra/image/Dockerfile --target cpu --build-arg REVISION=$(python -m jobs.revision) --tag {cpu} .
#
# PIP_EXTRA_INDEX_URL may name an index with torch's builds for CPUs, which are smaller; the versions stay those of the lock.
FROM {python} AS base
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends bash git libgomp1 procps tini wget \\
 && rm -rf /var/lib/apt/lists/* \\
 && useradd --create-home --uid {user} --user-group tempnet
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# The compilers stay in this stage. torch comes first, because DeepSpeed's build reads it.
FROM base AS packages
ARG PIP_EXTRA_INDEX_URL=""
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && python -m venv /opt/venv
COPY requirements.lock /build/requirements.lock
RUN python -m pip install --no-cache-dir --constraint /build/requirements.lock pip setuptools wheel ninja torch

FROM packages AS packages-cpu
RUN DS_BUILD_OPS=0 python -m pip install --no-cache-dir --no-build-isolation --requirement /build/requirements.lock

# DeepSpeed's operations are built here, so that no node needs a compiler or waits for one. The compiler is an extra of the
# package that torch requires for CUDA's libraries, and so has their version; the finished image does without it.
FROM packages AS packages-cuda
RUN python -c "import torch; assert torch.version.cuda, 'this torch is for CPUs: build cuda without PIP_EXTRA_INDEX_URL'" \\
 && python -m pip install --no-cache-dir --constraint /build/requirements.lock "cuda-toolkit[nvcc,cccl]" \\
 && cd /opt/venv/lib/python3*/site-packages/nvidia/cu* && mkdir --parents /usr/local/cuda/lib64 \\
 && ln -s $PWD/bin $PWD/include $PWD/nvvm /usr/local/cuda/ \\
 && for file in lib/*.so.*; do ln -s $PWD/$file /usr/local/cuda/lib64/$(basename ${{file%%.so.*}}).so; done
ENV CUDA_HOME=/usr/local/cuda TORCH_CUDA_ARCH_LIST="{architectures}"
RUN DS_BUILD_CPU_ADAM=1 DS_BUILD_FUSED_ADAM=1 DS_BUILD_UTILS=1 \\
    python -m pip install --no-cache-dir --no-build-isolation --requirement /build/requirements.lock \\
 && python -m pip uninstall --yes nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvvm

FROM packages-cpu AS packages-mlflow
COPY pyproject.toml /build/pyproject.toml
RUN python -m pip install --no-cache-dir $(python -c "import tomllib; \\
    print(*tomllib.load(open('/build/pyproject.toml', 'rb'))['project']['optional-dependencies']['server'])")

FROM base AS code
ARG REVISION=""
WORKDIR /opt/tempnet
COPY --chown={user}:{user} . .
ENV TEMPNET_REVISION=$REVISION TEMPNET_LOCKED=1 PYTHONPATH=/opt/tempnet
LABEL org.opencontainers.image.revision=$REVISION org.opencontainers.image.licenses=Apache-2.0
USER {user}:{user}
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "jobs.train_lm", "--help"]

FROM code AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv

FROM code AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-cuda /opt/venv /opt/venv

FROM code AS mlflow
COPY --from=packages-mlflow /opt/venv /opt/venv
EXPOSE 5000
CMD ["infra/mlflow/serve.sh"]
"""

_IGNORED = """\
**
!benchmarks
!infra
!jobs
!pipelines
!tempnet
!LICENSE
!README.md
!pyproject.toml
!requirements.lock
**/__pycache__
"""


def dockerfile(values: ClusterValues) -> str:
    """Return the Dockerfile, whose images run as a user without privileges and hold the locked packages."""
    image = values.image
    return _DOCKERFILE.format(
        cpu=image.reference("cpu"),
        python=image.python,
        architectures=image.cuda_architectures,
        user=USER_ID,
    )


def ignored_files() -> str:
    """Return the list of what is not sent to the build: all but the code and the lock, so that no secret gets into it."""
    return _IGNORED
