import Foundation

/// A draft tree, breadth first; node 0 is the newest token. The twin of `ssmlx/model/tree.py`.
struct DraftTree {
    var tokens: [Int32]
    var depths: [Int]
    var paths: [[Int]]

    // An edge's log probability is held in this range, so that a child scores below its parent
    // and the best nodes hold every ancestor of theirs.
    private static let edgeRange: ClosedRange<Float> = -20.0 ... -1e-3

    init(root: Int32) {
        (tokens, depths, paths) = ([root], [0], [[0]])
    }

    /// The tree below `root` of each stream's ranked candidates, [G * K] each.
    init(root: Int32, candidates: [Int32], logprobs: [Float], shape: Manifest.Tree) {
        tokens = [root] + shape.slots.map { candidates[$0] }
        (depths, paths) = (shape.depths, shape.paths)
        guard tokens.count > shape.size else { return }
        let range = Self.edgeRange
        let edges = [0] + shape.slots.map { min(max(logprobs[$0], range.lowerBound), range.upperBound) }
        let scores = depths.indices.map { node in
            paths[node][...depths[node]].dropFirst().reduce(Float(0)) { $0 + edges[$1] }
        }
        let best = scores.indices.sorted { scores[$0] > scores[$1] }.prefix(shape.size)
        self = selecting(best.sorted())
    }

    func parent(of node: Int) -> Int {
        paths[node][max(depths[node] - 1, 0)]
    }

    /// A node itself and its ancestors.
    func line(of node: Int) -> ArraySlice<Int> {
        paths[node][...depths[node]]
    }

    /// The tree of the nodes `keep`, ascending, which hold every ancestor of theirs.
    func selecting(_ keep: [Int]) -> DraftTree {
        var renumbered = [Int: Int]()
        for (index, node) in keep.enumerated() { renumbered[node] = index }
        var tree = self
        tree.tokens = keep.map { tokens[$0] }
        tree.depths = keep.map { depths[$0] }
        tree.paths = keep.map { paths[$0].map { renumbered[$0]! } }
        return tree
    }

    /// The nodes from the root along children that carry the model's own token.
    func acceptedPath(_ targets: [Int32]) -> [Int] {
        var path = [0]
        while let child = tokens.indices.dropFirst().first(where: {
            depths[$0] == path.count && parent(of: $0) == path.last! && tokens[$0] == targets[path.last!]
        }) {
            path.append(child)
        }
        return path
    }
}
