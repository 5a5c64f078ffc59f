"""Other people's test suites, plain and with everything evicted after every op: `make test-foreign`."""
