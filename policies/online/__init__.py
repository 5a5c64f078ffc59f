"""Decides op by op what runs again, and never sees what comes next."""
