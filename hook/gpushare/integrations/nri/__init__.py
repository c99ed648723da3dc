"""The NRI plugin, which adds gpushare's hooks to containers of engines whose configuration is unchanged.

    wire.py        the framing: NRI's connection multiplexer and ttrpc       (no side effects)
    protocol.py    the messages of ttrpc and of NRI's API, v1alpha1
    plugin.py      registers, answers the engine, and connects again until SIGTERM

Only protocol.py needs protobuf (`pip install gpushare[kubernetes]`). A container's start imports nothing of this
package: its hook only tests the lock that the plugin holds (agentlock.py).
"""
