"""The typed seam to the native half."""
