"""Python imports this module at its start, if this folder is on PYTHONPATH, as it is for the processes of a lane."""

import lanes

lanes.install()
