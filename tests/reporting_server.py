"""A TensorBoard, run as a script by the tests."""

import sys
import types

from tensorboard import default, program

if __name__ == "__main__":
    # TensorBoard's own switch for doing without TensorFlow, whose import
    # takes it 10 s.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
    server = program.TensorBoard(default.get_plugins())
    address = ["--host", "127.0.0.1", "--port", "0", "--reload_interval", "1"]
    server.main(server.configure(["tensorboard", *address, *sys.argv[1:]]))
