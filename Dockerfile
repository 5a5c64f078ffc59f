# The demo in a container, on the CPU:  docker build -t memmgr . && docker run --rm memmgr
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /memmgr
COPY . .
RUN make setup
CMD ["make", "demo"]
