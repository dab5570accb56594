"""What happens to a document, from input file to output row; knows nothing of Ray."""

import os

# How long threads of torch's processor kernels spin while they wait for each other, before they sleep. By default
# about thirty times as long, and wherever anything else runs two threads are then several times slower than one.
# Read once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
