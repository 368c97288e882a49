//! A mixed-integer program as plain data, before it is handed to a solver.

/// Position of a column.
pub(crate) type Column = usize;

/// `lower <= sum of coefficient x column <= upper`; an infinite side is no constraint.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) terms: Vec<(Column, f64)>,
    pub(crate) lower: f64,
    pub(crate) upper: f64,
}

/// Minimise `constant + sum of cost x column` over binary columns and columns that are real and not negative.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mip {
    pub(crate) constant: f64,
    pub(crate) costs: Vec<f64>,
    /// Value range of each integer column, (0, 1) for most unless fixed; `None` where the column is real.
    pub(crate) binary: Vec<Option<(f64, f64)>>,
    pub(crate) rows: Vec<Row>,
}

impl Mip {
    /// A binary column, which may be forbidden to be 1.
    pub(crate) fn binary(&mut self, cost: f64, may_be_one: bool) -> Column {
        self.costs.push(cost);
        self.binary.push(Some((0.0, if may_be_one { 1.0 } else { 0.0 })));
        self.costs.len() - 1
    }

    /// A column that is a whole number, 0 to `most`.
    pub(crate) fn integer(&mut self, cost: f64, most: usize) -> Column {
        self.costs.push(cost);
        self.binary.push(Some((0.0, most as f64)));
        self.costs.len() - 1
    }

    /// A real column in `0..`.
    pub(crate) fn real(&mut self, cost: f64) -> Column {
        self.costs.push(cost);
        self.binary.push(None);
        self.costs.len() - 1
    }

    pub(crate) fn row(&mut self, terms: Vec<(Column, f64)>, lower: f64, upper: f64) {
        self.rows.push(Row { terms, lower, upper });
    }

    pub(crate) fn at_most(&mut self, terms: Vec<(Column, f64)>, upper: f64) {
        self.row(terms, f64::NEG_INFINITY, upper);
    }
}
