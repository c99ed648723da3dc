#!python
import sys

from gpushare.wheel import runtime

sys.exit(runtime())
