"""Run the commands of README.md and docs/."""
