# What days of use would bring, in MINUTES: starts, kills, crowded containers; build/soak.json.

MINUTES ?= 10
.PHONY: soak
soak: root build ## ten minutes of starts, kills and crowds, then nothing may be left; MINUTES=1: the short form
	@$(VENV_PYTHON) -m tests.soak --minutes $(MINUTES)
