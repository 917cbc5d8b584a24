"""This package has engines without a model, for tests of faults and of scale.

Claims about SGLang itself are tested on SGLang.
"""
