//! R1 and R2: placeholders
