"""What README.md and docs/ say to type is typed."""
