"""Decides op by op which ops run again, and never sees the ops to come."""
