"""The host tier on a double of an accelerator's streams: docs/streams.md."""
