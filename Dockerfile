# An image with flowrl and the pinned packages of requirements.lock (docs/scaling.md, "A container"):
#   docker build -t flowrl --build-arg VERSION="$(.venv/bin/python -m setuptools_scm)" .
# gcc builds what Triton starts kernels with (pipeline.compile). The base has Python 3.11 or newer and Debian's packages; CUDA's libraries come with the wheels of torch. An index, a
# certificate or a proxy of yours goes in as --build-arg PIP_INDEX_URL=..., PIP_CERT=..., which `make setup` hands over.
# Git's history stays outside, so that the version is told; without it the image says 0.0.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_CERT
ARG VERSION=0.0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev make git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/flowrl
COPY . .
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_FLOWRL_TOOLKIT="$VERSION" make setup
ENV PATH=/opt/flowrl/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["flowrl"]
