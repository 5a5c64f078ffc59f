"""Other people's planners, as published."""
