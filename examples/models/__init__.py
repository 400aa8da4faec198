"""The models of the GPipe and torchgpipe papers: flat ``nn.Sequential``s, each in its own file.

A pipeline is cut between the layers of a Sequential, never inside one: the flatter a model is, the
better it can be balanced. ``skips`` shows how a layer still reaches past its neighbours.
"""
