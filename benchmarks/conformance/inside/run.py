"""What the runtime starts inside: finds its package without any environment."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from inside import hold

hold.main()
