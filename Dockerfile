# convolve to train, export and serve, as a user without privileges; docs/install.md has the commands.
# The base: Debian or Ubuntu with Python 3.10 or newer.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# gcc compiles the native kernels on first use, because they are made for the CPU that runs the container.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=export,serve
# The index of PyTorch's CPU build. Arguments are stored in the image: an index with a password belongs in the secret.
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,target=/source --mount=type=secret,id=pip.conf \
    python3 -m venv /opt/convolve \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/convolve/bin/pip install --no-cache-dir "/source[$EXTRAS]"
ENV PATH=/opt/convolve/bin:$PATH XDG_CACHE_HOME=/cache

ARG UID=1000
RUN useradd --non-unique --uid "$UID" --create-home convolve && install -d -o convolve -g convolve /cache /work
USER convolve
WORKDIR /work
VOLUME /cache
ENTRYPOINT ["convolve"]
