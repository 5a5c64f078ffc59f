# The demo in a container, on the CPU; its picture comes out in the current folder:
#
#   docker build -t memmgr . && docker run --rm --user "$(id -u)" -v "$PWD":/out memmgr
#
# All else goes after the name: docker run --rm memmgr memmgr doctor --quick, or python /examples/plain.py. The whole demo holds 3 GB
# at once, --quick less. Podman without root takes --userns keep-id beside --user.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
# Torch brings CUDA's libraries, gigabytes that nothing here uses. --build-arg PIP_EXTRA_INDEX_URL=... with torch's index of
# CPU wheels leaves them out.
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/memmgr && /opt/memmgr/bin/pip install --no-cache-dir torch==2.13.0 numpy psutil
WORKDIR /memmgr
COPY . .
RUN make wheel WITH=/opt/memmgr/bin/python && /opt/memmgr/bin/pip install --no-cache-dir "$(echo dist/*.whl)[demo]"

# The pager is compiled: no compiler from here on.
FROM python:3.11-slim
COPY --from=build /opt/memmgr /opt/memmgr
COPY examples /examples
# Whoever runs it may have no home of his own.
ENV PATH=/opt/memmgr/bin:$PATH HOME=/tmp
# Any user may write here, with a folder mounted or without one.
RUN mkdir --mode=1777 /out
WORKDIR /out
USER nobody
CMD ["memmgr", "demo"]
