"""The page: its files, and the planner as a form."""

from fastapi import FastAPI

# --------------------------------------------------------------------------------------------------
# The planner


def add_planner(app: FastAPI) -> None:
    """The endpoints of the planner's form."""
