"""What happens to a document, from input file to output row; knows nothing of Ray."""

import os

# Threads of torch's processor kernels sleep while they wait for each other. By default they spin, and on a machine
# where anything else runs two of them are several times slower than one. Read once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
