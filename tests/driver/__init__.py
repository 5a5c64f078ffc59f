"""The accelerator's half of the core, on a double of the driver library."""
