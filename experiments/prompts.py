"""What the studies of loaded checkpoints ask."""

PROMPTS = (
    "Write a long story about a lighthouse keeper and a storm.",
    "Explain step by step how bread is made, from grain to loaf.",
    "Write a Python program that sorts a list in five different ways, and explain each.",
    "Describe how the human heart works, in as much detail as you can.",
)
