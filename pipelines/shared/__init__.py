"""What the families and the generic route share: cards, schedules, embeddings, the pipeline of a family."""
