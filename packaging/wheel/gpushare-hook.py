#!python
import sys

from gpushare.wheel import hook

sys.exit(hook())
