"""The programs that start containers: hook, runtime, run; and explain, which shows what they would do."""
