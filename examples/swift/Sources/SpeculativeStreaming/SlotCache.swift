import CoreML

/// Which slot of the model's cache holds which token. The twin of `ssmlx/exported/decode.py`.
///
/// A step writes each node of its tree into a free slot. Accepting a node makes its slot a
/// committed one; the others are free again, and nothing in the cache is ever moved.
struct SlotCache {
    // What is added to the score of a slot that a row does not see.
    static let masked: Float16 = -1e4

    let state: MLState
    private(set) var slots: [Int] = []
    private var used: [Bool]

    init(state: MLState, numSlots: Int) {
        self.state = state
        used = Array(repeating: false, count: numSlots)
    }

    /// Committed tokens.
    var offset: Int { slots.count }

    func free(_ count: Int) throws -> [Int] {
        let found = Array(used.indices.lazy.filter { !used[$0] }.prefix(count))
        guard found.count == count else { throw ExportError.contextIsFull }
        return found
    }

    mutating func commit(_ more: [Int]) {
        slots += more
        for slot in more { used[slot] = true }
    }

    /// [1, 1, R, S]: each row sees all that is committed, and of `rows` those that it names.
    func mask(rows: [Int], visible: (Int) -> [Int]) -> MLShapedArray<Float16> {
        let base = used.map { $0 ? Float16(0) : Self.masked }
        var scalars = [Float16]()
        scalars.reserveCapacity(rows.count * used.count)
        for row in rows.indices {
            var line = base
            for other in visible(row) { line[rows[other]] = 0 }
            scalars += line
        }
        return MLShapedArray(scalars: scalars, shape: [1, 1, rows.count, used.count])
    }
}
