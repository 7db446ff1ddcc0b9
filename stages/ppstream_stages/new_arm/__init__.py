"""An arm with cameras, complete: policy, robot and test. ``ppstream init`` copies these files."""
