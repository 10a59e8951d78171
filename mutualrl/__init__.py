"""`mutualrl`: mutual reinforcement learning of several unlike language models in JAX.

Importing the package loads no accelerator and no heavy library; import what you need, e.g.
`from mutualrl.policy import Policy`.
"""

__version__ = "0.1.0"
