"""From a Snapshot to a NodePlan: every decision about traffic, made once. Pure functions only."""
