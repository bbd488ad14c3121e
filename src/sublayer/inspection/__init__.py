"""Looking at models: what they will need before they are built."""

from .plan import Plan, plan

__all__ = ["Plan", "plan"]
